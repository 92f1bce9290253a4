"""What a training step needs beside a reducer."""
