"""Every byte against every promise."""
