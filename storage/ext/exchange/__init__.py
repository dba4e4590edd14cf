"""The formats that are built in, one file each, and what several of them share."""
