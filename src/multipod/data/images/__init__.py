"""Images: decoding, cropping, augmenting, and a cache of what was decoded."""
