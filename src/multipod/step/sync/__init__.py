"""The ways from each device's gradients to new weights: one class each, chosen by `choose.sync_of`."""
