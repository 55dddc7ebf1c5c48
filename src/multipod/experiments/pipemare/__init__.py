"""PipeMare (arXiv:1910.05124): limits, delays, memory, and asynchronous pipelines."""
