"""Private parts of dependencies, one module each; argument checks, import paths, and optional packages."""
