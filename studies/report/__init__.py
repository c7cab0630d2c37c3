"""What studies came to: figures, verdicts, pages and pictures from their raw results."""
