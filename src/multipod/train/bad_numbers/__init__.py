"""Bad numbers: updates that are not finite, losses that leap, who caused them, and the same update again."""
