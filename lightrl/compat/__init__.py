"""Private parts of dependencies, one file each; arguments, import paths, and optional packages."""
