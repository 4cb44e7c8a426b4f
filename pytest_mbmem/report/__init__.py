"""What a run says to people and to other programs: one file for each form."""
