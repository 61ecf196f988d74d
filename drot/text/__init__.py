"""Text from files and from the hub, as token ids."""
