"""`headwise bench`: speed and memory against the peers, measured side by side on the user's machine."""
