"""Slices of brain MRI with masks of abnormal tissue."""
