"""What tests of several rooms share: scripted peers and drivers."""
