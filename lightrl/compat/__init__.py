"""Every use of a dependency's private parts, one file per dependency."""
