"""No server: clients collect from their peers and mix what they get."""
