"""The probe set: generated sentences with exact gold links."""
