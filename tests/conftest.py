"""Beside this file lie the tools that tests of all folders share; pytest puts its folder on the path."""
