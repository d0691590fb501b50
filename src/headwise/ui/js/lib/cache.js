// A cache with a limited number of entries.

/** Drops the entry that was used longest ago. */
export class LruCache {
  /** @param {number} limit number of entries */
  constructor(limit) {
    this.limit = limit;
    /** @type {Map<string, any>} */
    this.entries = new Map();
  }

  /** @template T @param {string} key @param {() => T} make computes a missing entry @returns {T} */
  get(key, make) {
    const value = this.entries.has(key) ? this.entries.get(key) : make();
    this.entries.delete(key);
    this.entries.set(key, value);
    const [oldest] = this.entries.keys(); // a Map keeps its order of insertion
    if (this.entries.size > this.limit) this.entries.delete(oldest);
    return value;
  }

  /** @param {string} key */
  has(key) {
    return this.entries.has(key);
  }

  /** An entry that is there already. @param {string} key */
  peek(key) {
    return this.entries.get(key);
  }

  /** @param {string} key */
  delete(key) {
    this.entries.delete(key);
  }
}
