"""CIFAR-10 and CIFAR-100: image classification."""
