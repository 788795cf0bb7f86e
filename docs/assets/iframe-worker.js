// Search where the pages lie in a plain folder: a browser starts no worker for a page that is opened as a file. There a
// frame runs the script of the theme's search. Its name keeps the theme from loading such a part from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script src="${script}"></${"script"}>`
      this.ready = new Promise(resolve => this.frame.addEventListener("load", resolve))
      document.body.append(this.frame)
    }

    async postMessage(data) {
      await this.ready
      const inside = this.frame.contentWindow
      inside.postMessage = answer => this.dispatchEvent(new MessageEvent("message", { data: answer }))
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
}
