"""What comes in and goes out over HTTP, as typed fields."""
