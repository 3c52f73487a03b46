"""Does a parallel run equal one device?"""
