"""The headline: does K-FAC reach the target sooner than the best tuned first-order method, in seconds?"""
