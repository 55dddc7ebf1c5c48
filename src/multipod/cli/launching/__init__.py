"""What `multipod launch` is made of: the command that it starts, how its processes are started, what is reported."""
