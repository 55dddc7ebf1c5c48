"""Published models as tables of layers, the steps that were measured of them, and the constants fitted to those."""
