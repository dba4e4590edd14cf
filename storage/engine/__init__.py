"""Transfer of rows to and from mapped columns, common to all formats."""
