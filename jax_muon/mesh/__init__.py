"""Where does an array lie? Meshes, specs, owners, and what travels."""
