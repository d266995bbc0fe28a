"""What maintains the repository: locks, audit, generated docs, pictures, recordings. Not shipped."""
