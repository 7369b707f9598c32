"""What stands in for the launchers and their surroundings while a script of the user's runs in bash."""
