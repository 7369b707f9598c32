"""What stands in for `msrun` and its surroundings while a script of the user's runs in bash."""
