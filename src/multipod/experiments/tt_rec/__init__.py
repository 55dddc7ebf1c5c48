"""TT-Rec (arXiv:2101.11714): tensor-train tables for DLRM."""
