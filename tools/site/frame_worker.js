// Browsers start no workers from file:// addresses, and the site's search runs in one. There, a hidden frame takes its
// place. The name of this file's address contains "iframe-worker", so that mkdocs-material loads no shim of its own.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    /** @param {string | URL} url the worker's script */
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.ready = new Promise((resolve) => {
        this.frame.onload = () => {
          const scope = this.frame.contentWindow;
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          scope.importScripts = (...urls) => Promise.all(urls.map((script) => load(scope.document, script)));
          resolve(load(scope.document, url).then(() => scope));
        };
      });
      document.body.append(this.frame);
    }

    /** @param {unknown} data */
    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };

  /**
   * @param {Document} target
   * @param {string | URL} url
   */
  function load(target, url) {
    return new Promise((resolve, reject) => {
      const script = target.createElement("script");
      script.src = String(url);
      script.onload = resolve;
      script.onerror = reject;
      target.body.append(script);
    });
  }
}
