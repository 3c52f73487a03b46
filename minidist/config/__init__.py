"""What is to be trained, and may it run? Settings, files of settings, and the rules of what does not combine."""
