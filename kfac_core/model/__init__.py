"""Where K-FAC meets the user's model: hooks that capture statistics, gradients, wrappers."""
