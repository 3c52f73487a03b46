"""What will a job cost in bytes, memory and time?"""
