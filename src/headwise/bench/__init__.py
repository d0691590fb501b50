"""Speed and memory against the peers, measured side by side on the user's own machine."""
