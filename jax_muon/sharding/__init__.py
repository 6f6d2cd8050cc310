"""Where optimizer state and work live on a mesh: wrappers around the pieces."""
