"""Run outputs one after the other, and have formats explain what is wrong with theirs."""
