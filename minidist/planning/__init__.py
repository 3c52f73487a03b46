"""What will a job cost in bytes, memory and time? Closed forms and one measurement; nothing here trains."""
