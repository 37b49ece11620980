"""Dense arithmetic: Gram matrices, packed triangles, matrix products, transposed copies."""
