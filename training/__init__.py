"""Training and comparison scripts for Attention Residuals: `python -m training.image`, `python -m training.compare`."""
