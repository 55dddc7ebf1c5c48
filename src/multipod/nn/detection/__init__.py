"""Parts of detectors, each a function of arrays: boxes, anchors, matching, suppression, RoIAlign, pyramids, masks."""
