"""COCO and scenes of digits: object detection and instance segmentation."""
