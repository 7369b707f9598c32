"""What is installed, what will be used, what is wrong and how to fix it."""
