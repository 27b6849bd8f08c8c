"""The endpoint: programs written with any SDK use the policy as a model server, and are trained unchanged."""
