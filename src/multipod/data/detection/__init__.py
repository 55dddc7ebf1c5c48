"""Images with objects: boxes, classes and masks, from COCO's files, TFRecords, or drawn."""
