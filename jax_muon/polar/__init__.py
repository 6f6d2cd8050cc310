"""What is a polar factor, and how is it computed? Arrays (..., m, n) to arrays."""
