"""karn: the face. Command line, terminal progress, reports and plots."""
