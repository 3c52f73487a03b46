"""What is to be trained, and may it run?"""
