"""Studies: whole protocols as commands that can be interrupted, and leave raw results behind."""
