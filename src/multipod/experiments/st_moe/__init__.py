"""ST-MoE (arXiv:2202.08906): claims on routers, experts and fine-tuning."""
