"""What tests of several folders share: models, inputs, expected values and ways to run them."""
