"""The command line: one file per command, which reads arguments and prints; the work stands in the other rooms."""
