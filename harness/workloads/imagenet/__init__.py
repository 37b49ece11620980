"""ImageNet-1k, or any folder of images with a folder for each class: image classification."""
