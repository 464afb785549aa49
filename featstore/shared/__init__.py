"""One buffer of rows for the processes of a host."""
